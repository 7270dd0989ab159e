-- A sale with its figures, as storedRow in reservation/catalog/sale_count.go reads it. The query has its row as s, and adds
-- waiting and final.
{{columns/sale}}, s.sold,
       CASE WHEN s.items > 0 THEN ARRAY(SELECT i.sold FROM sale_items AS i WHERE i.sale_id = s.id ORDER BY item < 'a', item) END AS items_sold,
       s.published_revision, s.retired_at IS NOT NULL AS retired, s.archived_at IS NOT NULL AS archived
