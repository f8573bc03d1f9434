"""A layer: a user's own Python packages in a small SIF, bound into the container beside the image."""
