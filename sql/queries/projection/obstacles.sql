-- Additions to the table orders that a rebuild cannot copy to another table, as texts.
SELECT format('the column %s', attname) FROM pg_attribute
WHERE attrelid = 'orders'::regclass AND attnum > 0 AND NOT attisdropped AND attname <> ALL
    ('{id,sale_id,user_id,quantity,status,version,sequence,epoch,reserved_at,updated_at,reason,due,payment_reference,key_fingerprint}'::text[])
UNION ALL
SELECT format('the trigger %s', tgname) FROM pg_trigger
WHERE tgrelid = 'orders'::regclass AND NOT tgisinternal AND tgname <> ALL ('{note_new_orders,note_changed_orders,note_deleted_orders}'::text[])
UNION ALL
SELECT format('the constraint %s of %s', conname, conrelid::regclass) FROM pg_constraint
WHERE conrelid = 'orders'::regclass AND contype NOT IN ('c', 'p', 'n') OR confrelid = 'orders'::regclass
UNION ALL
SELECT format('the policy %s', polname) FROM pg_policy WHERE polrelid = 'orders'::regclass
UNION ALL
SELECT format('the statistics %s', stxname) FROM pg_statistic_ext WHERE stxrelid = 'orders'::regclass
UNION ALL
SELECT format('the publication %s', pubname) FROM pg_publication_rel JOIN pg_publication AS p ON p.oid = prpubid WHERE prrelid = 'orders'::regclass
UNION ALL
SELECT format('the inheritance relation with %s', CASE inhrelid WHEN 'orders'::regclass THEN inhparent ELSE inhrelid END::regclass) FROM pg_inherits
WHERE 'orders'::regclass IN (inhrelid, inhparent)
UNION ALL
SELECT DISTINCT format('%s, which reads it', pg_describe_object('pg_class'::regclass, r.ev_class, 0))
FROM pg_depend AS d JOIN pg_rewrite AS r ON r.oid = d.objid
WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = 'orders'::regclass AND r.ev_class <> 'orders'::regclass
UNION ALL
SELECT DISTINCT format('%s, which needs it', pg_describe_object(classid, objid, objsubid))
FROM pg_depend
WHERE refclassid = 'pg_class'::regclass AND refobjid = 'orders'::regclass AND classid = 'pg_proc'::regclass
   OR refclassid = 'pg_type'::regclass AND refobjid = (SELECT reltype FROM pg_class WHERE oid = 'orders'::regclass) AND deptype = 'n'
UNION ALL
SELECT 'its row security' FROM pg_class WHERE oid = 'orders'::regclass AND (relrowsecurity OR relforcerowsecurity)
UNION ALL
SELECT 'the option UNLOGGED' FROM pg_class WHERE oid = 'orders'::regclass AND relpersistence <> 'p'
