-- Records that the tables have no order of the archived sale $1 any more.
UPDATE sales SET archive = archive || jsonb_build_object('deleted_at', now()) WHERE id = $1
