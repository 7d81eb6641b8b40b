//! Reservations of a migration for its ends of tunnels, before there is a record: ports of UDP, and a private key.

use std::collections::BTreeSet;
use std::io;

use super::{RedirectionError, RedirectionKeeper};
use crate::redirection::kernel_names::KernelNames;
use crate::redirection::record::{RedirectionRecord, ReservedEnd};
use crate::redirection::tunnel::{FreePorts, Key, TunnelKind, TunnelPorts};
use crate::redirection::wireguard;

impl RedirectionKeeper {
    /// Returns the ports for the next tunnel.
    ///
    /// # Errors
    /// If the records cannot be read.
    pub fn free_ports(&self, ports: TunnelPorts) -> Result<FreePorts, RedirectionError> {
        let records = self.records()?;
        let is_shared =
            |record: &RedirectionRecord| record.own_ports(TunnelKind::Vxlan).any(|port| port == ports.vxlan);
        let has_vxlan = records.iter().any(is_shared) || self.kernel.is_port_free(ports.vxlan);
        Ok(FreePorts {
            vxlan: has_vxlan.then_some(ports.vxlan),
            wireguard: self.wireguard_ports(&records, ports.wireguard, 1)?.pop(),
            range: ports.wireguard,
        })
    }

    /// Returns the ports for as many further tunnels of `WireGuard`, as far as ports are free.
    ///
    /// # Errors
    /// If the records cannot be read.
    pub fn further_ports(&self, ports: TunnelPorts, count: usize) -> Result<Vec<u16>, RedirectionError> {
        let free = self.wireguard_ports(&self.records()?, ports.wireguard, count + 1)?;
        Ok(free.into_iter().skip(1).collect())
    }

    fn wireguard_ports(
        &self,
        records: &[RedirectionRecord],
        [first, last]: [u16; 2],
        count: usize,
    ) -> Result<Vec<u16>, RedirectionError> {
        let mut used: BTreeSet<_> =
            records.iter().flat_map(|record| record.own_ports(TunnelKind::WireGuard)).collect();
        for migration in self.files(self.store.ends())? {
            match self.store.end(&migration) {
                // It was not needed, and has been removed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                end => used.extend(self.files(end)?.ports),
            }
        }
        let is_free = |port: &u16| !used.contains(port) && self.kernel.is_port_free(*port);
        Ok((first..=last).filter(is_free).take(count).collect())
    }

    /// Reserves a port for this host's end of a tunnel of `WireGuard`, and makes a private key for all tunnels of the
    /// migration. Returns the public one and the port; none if no port is free. All are kept until the end of the
    /// redirection, or until [`forget_key`](Self::forget_key).
    ///
    /// # Errors
    /// If the records cannot be read, the key cannot be stored, or the kernel has no `WireGuard`.
    pub fn reserve(
        &self,
        migration: &str,
        number: u32,
        ports: TunnelPorts,
    ) -> Result<Option<(Key, u16)>, RedirectionError> {
        let _changing = self.lock();
        let free = self.wireguard_ports(&self.records()?, ports.wireguard, 1)?.pop();
        let Some(port) = free else { return Ok(None) };
        let mut end = match self.store.end(migration) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                ReservedEnd { key: self.files(wireguard::private_key())?, ports: Vec::new() }
            }
            end => self.files(end)?,
        };
        end.ports.push(port);
        self.files(self.store.put_end(migration, &end))?;
        match self.kernel.public_key(&end.key, &KernelNames(number).tunnel()) {
            Ok(public) => Ok(Some((public, port))),
            Err(source) => {
                self.forget_key(migration)?;
                Err(RedirectionError::Kernel { object: "a public key".to_owned(), source })
            }
        }
    }

    /// Forgets what a migration has reserved for a tunnel that is not made.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn forget_key(&self, migration: &str) -> Result<(), RedirectionError> {
        self.files(self.store.remove_end(migration))
    }

    /// Forgets what migrations have reserved that no record names, and that are not open.
    ///
    /// # Errors
    /// If the records cannot be read, or a file cannot be removed.
    pub fn forget_unused_keys(&self, is_open: impl Fn(&str) -> bool) -> Result<(), RedirectionError> {
        let _changing = self.lock();
        self.files(self.store.remove_unwritten())?;
        let records = self.records()?;
        let is_used = |migration: &str| {
            is_open(migration) || records.iter().any(|record| record.redirection.migration == migration)
        };
        let reserved = self.files(self.store.ends())?;
        reserved.iter().filter(|name| !is_used(name)).try_for_each(|name| self.forget_key(name))
    }
}
