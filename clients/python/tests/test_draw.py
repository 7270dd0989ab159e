import hashlib
import os
from datetime import datetime, timedelta, timezone

from .shop import ADMIN_TOKEN, URL, ShopCase, buyer, create_sale, new_user, send, until


class DrawTest(ShopCase):
    def test_an_entrant_is_offered_a_unit_and_pays(self) -> None:
        goods = create_sale(stock=1, payment_window_seconds=600)
        closes = datetime.now(timezone.utc) + timedelta(seconds=3)
        entries = create_sale(stock=100, closes_at=closes.isoformat())
        self.assert_problem("draw-not-found", lambda: buyer().draw(goods.id))
        secret = os.urandom(32)
        terms = {
            "entries_sale_id": entries.id,
            "parties": [{"name": "ann", "commitment": hashlib.sha256(secret).hexdigest()}],
        }
        path = f"{URL}/v1/sales/{goods.id}/draw"
        send("POST", path, terms, Authorization=f"Bearer {ADMIN_TOKEN}")
        self.assertTrue(buyer().sale(goods.id).offers_only)
        self.assert_problem("offers-only", lambda: buyer().buy(goods.id))

        clients = [buyer(new_user()) for _ in range(3)]
        draw = buyer().draw(goods.id)
        self.assertEqual(draw.state, "entering")
        receipts = [client.buy(draw.entries_sale_id).order.receipt for client in clients]
        self.assert_problem("draw-not-frozen", lambda: buyer().draw_proof(goods.id, receipts[0]))
        until(lambda: buyer().draw(goods.id).state == "frozen")
        draw = buyer().draw(goods.id)
        self.assertEqual(draw.entries, 3)
        assert draw.reveal_by is not None and draw.frozen_at is not None
        self.assertGreater(draw.reveal_by, draw.frozen_at)
        self.assertEqual(buyer().draw_proof(goods.id, receipts[0]).outcome, "waiting")
        send("POST", f"{path}/reveal", {"party": "ann", "secret": secret.hex()})
        until(lambda: buyer().draw(goods.id).offered == 1)
        proofs = [buyer().draw_proof(goods.id, receipt) for receipt in receipts]
        self.assertEqual(sorted(proof.rank or 0 for proof in proofs), [0, 1, 2])
        for client, proof in zip(clients, proofs):
            self.assertEqual(proof.outcome, "offered" if proof.rank == 0 else "waiting")
            if proof.order_id is not None:
                self.assertEqual(client.pay(proof.order_id, f"pi-{goods.id}").status, "paid")
