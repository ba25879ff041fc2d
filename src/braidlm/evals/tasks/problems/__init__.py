"""Problems whose solutions a model writes: maths and code."""
