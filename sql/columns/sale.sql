-- A sale, as reservation.SaleRow reads it. The query has its row as s.
s.id, s.name, s.stock, s.state, {{columns/terms}},
       CASE WHEN s.items > 0 THEN items_of(s.id) END AS items, s.epoch, s.revision, s.partitions, s.shards, s.offers_only,
       (SELECT d.entries_id FROM draws AS d WHERE d.sale_id = s.id AND (d.kind = 'waitlist' OR s.offers_only)) AS entries_id,
       (SELECT e.state = 'ended' FROM draws AS d JOIN sales AS e ON e.id = d.entries_id WHERE d.sale_id = s.id AND d.kind = 'waitlist') IS TRUE AS waitlist_closed,
       (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = s.id) AS entry_for, s.created_at
