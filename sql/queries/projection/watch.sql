-- Has every change of orders noted in order_changes. Run as it is by the simple protocol, in one transaction.
--
-- Nobody who changes orders needs rights on that table, and nobody fills it for ever: whoever rebuilds holds
-- the advisory lock 5077217435 for as long as he lives, and without him nothing is noted.
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
