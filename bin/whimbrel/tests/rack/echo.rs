//! A client of the guest's echo server: one connection, never reopened, over which bytes go to the guest and back.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lab::{DEADLINE, Host, until};

/// Bytes that are on their way at most.
const BLOCK: usize = 8 << 10;
/// The port of the guest's server.
const PORT: u16 = 7;

/// A connection that is in use.
pub(crate) struct Echo {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<(), String>>,
}

impl Echo {
    /// Connects from a host, and begins.
    pub(crate) fn start(host: &Host, guest: Ipv4Addr) -> Self {
        let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (host, counter, stopped) = (host.clone(), Arc::clone(&rounds), Arc::clone(&stop));
        let (ready, connected) = mpsc::channel();
        let thread = thread::spawn(move || {
            let connection = host.within(|| connect(guest)).map_err(|error| error.to_string())??;
            ready.send(()).map_err(|error| error.to_string())?;
            exchange(connection, &counter, &stopped)
        });
        // Disconnected if there is no connection: the reason is the thread's result.
        assert!(connected.recv().is_ok(), "no connection to the guest: {:?}", thread.join());
        Self { rounds, stop, thread }
    }

    /// Waits until bytes that are sent from now on have come back.
    #[track_caller]
    pub(crate) fn wait_for_more(&self) {
        let before = self.rounds.load(Relaxed);
        // The block that is on its way may have been answered before.
        until("the guest answers over the connection", || {
            self.rounds.load(Relaxed) >= before + 2 || self.thread.is_finished()
        });
        assert!(!self.thread.is_finished(), "the connection has ended");
    }

    /// Ends it, and returns the number of blocks that have come back.
    pub(crate) fn finish(self) -> u64 {
        self.stop.store(true, Relaxed);
        self.thread.join().unwrap().unwrap();
        self.rounds.load(Relaxed)
    }
}

fn connect(guest: Ipv4Addr) -> Result<TcpStream, String> {
    let connect = || -> std::io::Result<TcpStream> {
        let connection = TcpStream::connect_timeout(&(guest, PORT).into(), DEADLINE)?;
        connection.set_nodelay(true)?;
        connection.set_read_timeout(Some(DEADLINE))?;
        connection.set_write_timeout(Some(DEADLINE))?;
        Ok(connection)
    };
    // The guest may not listen yet.
    let attempts = std::iter::repeat_with(connect).enumerate();
    for (number, attempt) in attempts {
        match attempt {
            Ok(connection) => return Ok(connection),
            Err(error) if number == 100 => return Err(format!("{guest}: {error}")),
            Err(_) => thread::sleep(Duration::from_millis(200)),
        }
    }
    Err(format!("{guest}: no attempt"))
}

/// Sends blocks of changing content, and compares what comes back.
fn exchange(mut connection: TcpStream, rounds: &AtomicU64, stop: &AtomicBool) -> Result<(), String> {
    let mut back = vec![0; BLOCK];
    while !stop.load(Relaxed) {
        let number = rounds.load(Relaxed);
        let block: Vec<u8> = (0..BLOCK as u64).map(|n| (n ^ number.wrapping_mul(31)) as u8).collect();
        let failed = |error: std::io::Error| format!("after {number} blocks: {error}");
        connection.write_all(&block).map_err(failed)?;
        connection.read_exact(&mut back).map_err(failed)?;
        if back != block {
            return Err(format!("block {number} has changed on its way"));
        }
        rounds.store(number + 1, Relaxed);
    }
    Ok(())
}
