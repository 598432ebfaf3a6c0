"""View-synchronous collectives: training loops that know nothing of faults keep running.

All surviving members see the same result of each collective, and the same change of membership
between the same two collectives. `rules` has the protocol as a pure state machine, with its theory
of operation on top. `operations` says what survivors do with each kind of collective.
"""
