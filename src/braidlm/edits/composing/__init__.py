"""What `compose` needs: the models that become paths, the layout of the whole, and the origin of its tensors."""
