"""One step of a training: from a batch to updated parameters, in which precision, on how many processes and threads."""
