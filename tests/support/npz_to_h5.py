#!/usr/bin/env python3
"""Turns a numpy archive of traces into the HDF5 file the C++ tests read: npz_to_h5.py IN.npz OUT.h5

One dataset per array under its own name (f32 or i32; gzip where large); the root attribute `ids` holds the token ids.
Kept as the record of how tests/data/models/*.trace.h5 were made; nothing in the build or the tests runs it.
"""
import sys

import h5py
import numpy as np


def main() -> None:
    source, target = sys.argv[1:]
    arrays = np.load(source)
    with h5py.File(target, "w", libver="earliest", track_order=False) as out:
        out.attrs["ids"] = arrays["ids"].astype("<i4")
        for name in arrays.files:
            a = np.ascontiguousarray(arrays[name])
            a = a.astype("<f4" if a.dtype.kind == "f" else "<i4")
            # A chunk index costs more than gzip saves on a small array.
            packed = dict(compression="gzip", compression_opts=9, shuffle=True) if a.nbytes > 8192 else {}
            out.create_dataset(name, data=a, track_times=False, **packed)


main()
