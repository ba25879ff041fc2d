"""Routers, the record of their choices, sparse dispatch, stacked banks of experts and the routing losses."""
