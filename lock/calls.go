package lock

import (
	"strconv"
)

// call tells the tries of one script call from any other one: serials grow with every call of a
// Locker, and no two calls that are not settled share a receipt.
type call struct {
	receipt receipt
	serial  uint64
}

// receipt is the name of a key under which Redis knows a call, without what a cluster needs more.
type receipt string

// receipts hands out those that no call uses, the one that was used last first.
type receipts struct {
	unused []receipt
	made   int
}

// newCall needs mu.
func (l *Locker) newCall() call {
	return call{receipt: l.takeReceipt(), serial: l.nextSerial()}
}

// takeReceipt needs mu.
func (l *Locker) takeReceipt() receipt {
	r := &l.receipts
	if n := len(r.unused); n > 0 {
		last := r.unused[n-1]
		r.unused = r.unused[:n-1]
		return last
	}
	r.made++
	return receipt(l.prefix + ":receipt:" + l.id + ":" + strconv.Itoa(r.made))
}

// nextSerial needs mu.
func (l *Locker) nextSerial() uint64 {
	l.serial++
	return l.serial
}

// name makes a call's serial unique among all processes.
func (l *Locker) ownerName(serial uint64) string {
	return l.id + ":" + decimal(serial)
}

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

// releaseCall needs mu.
func (l *Locker) releaseCall(g *grant) call {
	if g.receiptMoved {
		return l.newCall()
	}
	g.receiptMoved = true
	return call{receipt: g.acquireCall.receipt, serial: l.nextSerial()}
}

// settle lets other calls use the receipt. It needs mu.
func (l *Locker) freeReceipt(c call) { l.receipts.unused = append(l.receipts.unused, c.receipt) }
