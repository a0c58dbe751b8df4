"""The two kinds of file through which processes talk; standard library only, no sockets, no pickle.

`desired`: the threshold of a deployment, written by the sidecar, read by each vLLM front end.
`stats`: counters of one rank or front end, written by it, read by whoever shows them.
"""
