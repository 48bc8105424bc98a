"""One run over several processes, each with its own devices: on several hosts, or on one.

``config`` describes the processes, ``start`` joins them through JAX's distributed runtime,
``peers`` lets them agree on values, ``watch`` notices lost processes, and ``arrays`` moves values
between a process and a mesh that spans all of them. With one process, the usual case, nothing is
started, agreed on or watched.
"""
