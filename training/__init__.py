"""How the embedded model was made: data, network, training, export. Not part of the package."""
