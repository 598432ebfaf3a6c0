"""The live views of a job: `elastane dashboard` in a browser and `elastane top` in a terminal.

`snapshot` makes what is shown from the view of a job (observe.view); it is pure. `following` keeps
the views of jobs up to date from their folders and coordinators. Of the web page, `index` finds
events again, `server` answers requests, `guard` says which are allowed, `connections` bounds their
connections, and `page` holds the files. Nothing here changes a job, and a page that does not read
blocks nothing.
"""
