-- Records that archived_payments has the payments of the archived sale $1.
UPDATE sales SET archive = archive || jsonb_build_object('remembered_at', now()) WHERE id = $1
