"""Pure tables of who sends what to whom and when."""
