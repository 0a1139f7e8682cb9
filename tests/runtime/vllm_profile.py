"""Run by the Python of an environment with vLLM: profile one generation of one prompt under tensor parallelism.

``python vllm_profile.py MODEL TRACES TP NEW PROMPT``: every rank writes a torch profiler trace into TRACES; the new
tokens are printed as JSON. A generation before the profile keeps compilation out of it.
"""

import json
import sys


def main() -> None:
    """Start the engine, warm it up, profile it."""
    from vllm import LLM, SamplingParams

    model, traces, tp, new, prompt = sys.argv[1:6]
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": traces,
        "torch_profiler_record_shapes": True,
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
    }
    llm = LLM(
        model,
        tensor_parallel_size=int(tp),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
        profiler_config=profiler,
    )
    sampling = SamplingParams(temperature=0, max_tokens=int(new), ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": json.loads(prompt)}]
    llm.generate(prompts, sampling, use_tqdm=False)
    llm.start_profile()
    out = llm.generate(prompts, sampling, use_tqdm=False)
    llm.stop_profile()
    print("TOKENS " + json.dumps(list(out[0].outputs[0].token_ids)), flush=True)


if __name__ == "__main__":
    main()
