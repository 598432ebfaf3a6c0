"""What agents, coordinator and workers say to each other, and the nouns of a job. Pure.

`model` has the nouns, `messages` the messages, `wire` their frames and the handshake, `events` and
`effects` what the shells and the rules exchange, `limits` every bound. Nothing here does I/O.
"""
