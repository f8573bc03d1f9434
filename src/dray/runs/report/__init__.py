"""A report of one or several runs, from their folders, as one HTML page.

`data` reads the folders, `sections` chooses the content, `html` and `figures` write it.
"""
