"""The evaluation of Bourtoule et al., "Machine Unlearning", run on unlearnd: `python -m benchmarks.paper`.

An experiment is a module here. It lists its *cells*, each a handful of settings that can be measured by itself; a cell
that has been measured is saved at once and never measured again, so a run may be stopped at any moment. What the cells
found becomes claims, tables and plots in `report`, and no figure there was written by hand.
"""
