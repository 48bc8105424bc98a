"""One run over several processes, each with its own devices: on several hosts, or on one.

``config`` says which processes there are, ``start`` joins them by JAX's distributed runtime, ``peers`` lets them
agree, ``watch`` notices that one is lost, and ``arrays`` moves values between a process and a mesh that spans all of
them. With one process, which is the rule, nothing is started, agreed on or watched.
"""
