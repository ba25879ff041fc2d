"""The corpora that Braid generates itself: stories and maths."""
