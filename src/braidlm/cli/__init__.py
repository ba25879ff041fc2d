"""Floor 9: one small file per verb; each has HELP, add_arguments(parser) and run(args)."""
