"""A report of one or several runs, from their folders, as one HTML page.

`data` reads the folders, `sections` chooses the content, `plots` lays out the curves, and page.html is the template.
"""
