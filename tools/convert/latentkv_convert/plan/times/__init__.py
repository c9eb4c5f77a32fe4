"""What attention to the cache costs on a GPU: counted work (features.py) times coefficients that were fitted
to measurements of it (fit.py), kept in a file per GPU (gpu_file.py): convert takes the one for the GPU that
is there.

Times are microseconds a layer that a decode step of one token takes at a depth beyond one at depth 0, where a
file with exact windows reads no latent.
"""
