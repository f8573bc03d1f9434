"""A package with the name of setuptools, which pip finds first while it fetches a source archive."""
