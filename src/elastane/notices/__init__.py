"""Notices: warnings from outside of the job that this node is about to go.

`rules` is pure: which sources there are, what a text means, and which notices are new and due. So
are `aws`, `gcp` and `azure`: the requests to their metadata servers, and what the answers mean.
`local` reads a file and a command, and `metadata` asks over HTTP. `watch` follows the sources in
the agent's loop and reports each notice once. A source that fails is tried again and never harms
the job; a notice that is not read costs what the loss of the node costs.
"""
