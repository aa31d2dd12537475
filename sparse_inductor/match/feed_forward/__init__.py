"""Feed-forward blocks with sparse activations, autoencoders among them."""
