"""Images: from containers/<variant>/ to build/dray-<variant>.sif and the Docker image dray:<variant>."""
