"""The formats of tasks: minimal pairs, multiple choice, code problems and the like; tasks/ fills them in."""
