"""Reports of runs from their folders: why one failed, an archive of one, and one or several as an HTML page.

Of the page, `data` reads the folders, `sections` chooses the content, `plots` lays out the curves, and page.html is the
template.
"""
