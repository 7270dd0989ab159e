-- The tables of months that are detached (archive_month) and were not dropped, for people; empty if there is none.
SELECT coalesce(string_agg(relname, ', ' ORDER BY relname), '') FROM pg_class
WHERE relnamespace = quote_ident(current_schema())::regnamespace AND relkind = 'r' AND NOT relispartition
  AND relname ~ '^(orders|order_events)_(first|[0-9]{4}_[0-9]{2})$'
