"""One engine on the GPU at a time, first come, first served.

:mod:`.queue` says which contender is next, :mod:`.turn` adds the lock and the waiting,
:mod:`.holding` what a holder owes the next one, :mod:`.sites` which work takes the turn,
:mod:`.length` how long.
"""
