"""``check``: will a pasted command, configuration or boot log start, fit and be wise. Stands on plan and engines."""
