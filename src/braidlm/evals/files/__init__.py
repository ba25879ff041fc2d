"""Reading the data files of tasks."""
