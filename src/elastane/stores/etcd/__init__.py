"""etcd as a store: v3 by its JSON gateway, and v2 for servers that still speak it.

`settings` reads the command line and holds the backends, `gateway` speaks HTTP to one of several
endpoints, `wire` is v3's JSON, `v3` and `v2` are the two stores, `server` starts a local server.
Only `gateway` knows httpx, which is imported with the first connection.
"""
