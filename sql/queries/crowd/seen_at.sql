-- The latest heartbeat of any ingress. Needs the schema.
SELECT seen_at FROM pulse
