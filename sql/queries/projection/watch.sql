-- Records every change of orders in order_changes. Run unchanged by the simple protocol, in one transaction.
--
-- Writers of orders need no rights on that table. It is only filled while a rebuild holds the advisory lock
-- 5077217435.
CREATE FUNCTION note_order_change() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF pg_try_advisory_lock_shared(5077217435) THEN
        PERFORM pg_advisory_unlock_shared(5077217435);
    ELSE
        INSERT INTO order_changes (order_id) SELECT id FROM changed;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER note_new_orders AFTER INSERT ON orders REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION note_order_change();
CREATE TRIGGER note_changed_orders AFTER UPDATE ON orders REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION note_order_change();
CREATE TRIGGER note_deleted_orders AFTER DELETE ON orders REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION note_order_change();
