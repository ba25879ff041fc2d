"""The steps of optimizers, sooner: torch's Muon for many matrices at once, and clipping and updates by few kernels."""
