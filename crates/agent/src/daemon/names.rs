//! Thread that brings the names of VMs to their state in DNS, also after the end of their migrations.

use std::io;
use std::sync::Arc;
use std::thread;

use host::Context;

/// Starts the thread. It ends with the context.
pub(super) fn keep(context: &Arc<Context>) -> io::Result<()> {
    let (context, signal) = (Arc::downgrade(context), context.names_keeper.signal());
    let step = move || {
        while let Some(context) = context.upgrade() {
            let pause = context.names_keeper.step(&context.journal);
            drop(context);
            signal.wait(pause);
        }
    };
    thread::Builder::new().name("names".to_owned()).spawn(step).map(drop)
}
