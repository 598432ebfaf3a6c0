"""The web page of a job: `elastane dashboard`.

`snapshot` makes what the page shows from the view of a job (observe.view); it is pure. `following`
keeps the views of jobs up to date from their folders and coordinators, and `index` finds their
events again. `server` answers requests, `guard` says which are allowed, `connections` bounds who
asks, and `page` holds the files of the page itself. Nothing here changes a job, and a page that
does not read blocks nobody.
"""
