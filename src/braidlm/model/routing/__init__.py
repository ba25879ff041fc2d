"""Who serves a token: routers, their record, sparse dispatch, stacked banks of experts and the routing losses."""
