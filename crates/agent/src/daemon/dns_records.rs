//! Thread that brings the names of VMs to their state in DNS, also after the end of their migrations.

use std::io;
use std::sync::Arc;
use std::thread;

use host::Context;

/// Starts the thread. It ends with the context.
pub(super) fn keep(context: &Arc<Context>) -> io::Result<()> {
    let (context, wakeup) = (Arc::downgrade(context), context.dns_keeper.wakeup());
    let step = move || {
        while let Some(context) = context.upgrade() {
            let pause = context.dns_keeper.tick(&context.journal);
            drop(context);
            wakeup.wait(pause);
        }
    };
    thread::Builder::new().name("names".to_owned()).spawn(step).map(drop)
}
