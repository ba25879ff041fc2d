"""What looks inside over HTTP: models, their tokens and routings, runs while they train, and reports."""
