"""What an image is made from: locks, wheels, Debian's packages, the base, a bundle of all of it."""
