"""The only door to container engines: Docker by its SDK, Podman by its command, Apptainer here or in a container."""
