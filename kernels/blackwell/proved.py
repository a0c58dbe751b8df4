"""The builds that were proved: fingerprints of their PTX, by the first part that runs each.

`docs/measurements/sm100-proof.md` says what ran; a build that is not here was not proved.
"""

PTX = {
    "dense, not causal": "11571036d7a5dd34de3879dd1d42bd30",
    "dense, causal": "59d164ee0e3ca26fbe4e2dffa7f69d7a",
    "vote": "70b4d9e4f2c37b1fff44ce84e36b0a78",
    "vote, own P": "1832f44d878386be43a8fce7d72317b5",
    "vote, not causal": "af07c1187864d64924fc9e778b840cfb",
    "masks": "ba59d5c0a10e614e5c3e1596726fc719",
}
