//! A relay between an agent and a server that loses or keeps back single messages.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use lab::{DEADLINE, Host};

/// Treatment of the next update; all other messages pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Injury {
    /// Nothing.
    None,
    /// It reaches the server; its answer is lost.
    LoseAnswer,
    /// It reaches the server when it is released. Its connection ends when it is cut.
    KeepBack,
}

#[derive(Debug)]
struct State {
    injury: Injury,
    kept: Option<Vec<u8>>,
    /// True if the connection of the update that was kept back has ended.
    is_cut: bool,
    /// Number of further connections; others wait.
    admitted: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    server: SocketAddr,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl Relay {
    /// Starts a relay in a host, at an address of its own.
    pub(crate) fn start(host: &Host, server: Ipv4Addr) -> Self {
        let listener = host.within(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()).unwrap();
        let state = Mutex::new(State { injury: Injury::None, kept: None, is_cut: false, admitted: u32::MAX });
        let relay = Self {
            address: listener.local_addr().unwrap(),
            server: (server, 53).into(),
            state: Arc::new((state, Condvar::new())),
        };
        let its = relay.clone();
        // The threads end with the test's process; connections are made in the host.
        host.within(move || {
            thread::spawn(move || {
                for client in listener.incoming() {
                    let relay = its.clone();
                    // An error is that of one connection: it ends.
                    thread::spawn(move || relay.pass(client?));
                }
            })
        })
        .unwrap();
        relay
    }

    pub(crate) fn injure_next(&self, injury: Injury) {
        self.state.0.lock().unwrap().injury = injury;
    }

    /// Waits until the injury has been done.
    pub(crate) fn wait(&self) {
        let state = self.state.0.lock().unwrap();
        let waited = self.state.1.wait_timeout_while(state, DEADLINE, |state| state.injury != Injury::None);
        assert!(!waited.unwrap().1.timed_out(), "there was no update");
    }

    /// Lets the update that was kept back reach the server. Returns its answer's code.
    pub(crate) fn release(&self, host: &Host) -> u8 {
        let kept = self.state.0.lock().unwrap().kept.take().unwrap();
        host.within(|| {
            let mut server = TcpStream::connect(self.server).unwrap();
            write(&mut server, &kept).unwrap();
            read(&mut server).unwrap()[3] & 0xf
        })
        .unwrap()
    }

    /// Ends the connection of the update that was kept back, and admits a number of others.
    pub(crate) fn cut_and_admit(&self, count: u32) {
        self.change(|state| {
            state.is_cut = true;
            state.admitted = count;
        });
    }

    /// Admits all connections again.
    pub(crate) fn admit_all(&self) {
        self.change(|state| state.admitted = u32::MAX);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.0.lock().unwrap());
        self.state.1.notify_all();
    }

    fn pass(&self, mut client: TcpStream) -> io::Result<()> {
        let state = self.state.0.lock().unwrap();
        let mut state = self.state.1.wait_while(state, |state| state.admitted == 0).unwrap();
        state.admitted -= 1;
        drop(state);
        let mut server = TcpStream::connect(self.server)?;
        loop {
            let request = read(&mut client)?;
            let is_update = (request[2] >> 3) & 0xf == 5;
            let injury = if is_update { self.state.0.lock().unwrap().injury } else { Injury::None };
            if injury == Injury::KeepBack {
                self.state.0.lock().unwrap().kept = Some(request);
                self.done();
                let state = self.state.0.lock().unwrap();
                drop(self.state.1.wait_while(state, |state| !state.is_cut));
                return Ok(());
            }
            write(&mut server, &request)?;
            let answer = read(&mut server)?;
            if injury == Injury::LoseAnswer {
                self.done();
                return Ok(());
            }
            write(&mut client, &answer)?;
        }
    }

    fn done(&self) {
        self.change(|state| state.injury = Injury::None);
    }
}

fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut message = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut message)?;
    Ok(message)
}

fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).unwrap();
    stream.write_all(&[&length.to_be_bytes(), message].concat())
}
