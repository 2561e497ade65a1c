"""Exits in the prompt: tokens of a prompt stop at one layer, and deeper layers get K/V made of predicted states.

    maps.py                             which tokens stop, and their predicted states; saved in router files
    prefill.py  gathered.py  slots.py   prompts run so: pass by pass on the host, and in whole passes on slots
    fit.py  moments.py  effects.py      the maps, the router and the score, fitted by calibration

Three files outside import it: `routing/router_file.py`, `engine/engine.py`, `calibration/calibrate.py`. The engine calls it as
the `PromptPass` of its plan.
"""
