// Who this program is, and whom it trusts: what it shows and asks for on every connection.
#pragma once

#include <string>

// PEM texts, not paths. No `ca`: plaintext.
struct Identity {
    std::string ca, cert, key;
    std::string token; // sent as bearer token with every call to the control plane
};
