# Of llama-cpp-python's build, only what the package loads: libllama, libmtmd and ggml's libraries, each one file.
#
#     cmake -DCMAKE_PROJECT_llama_cpp_INCLUDE=/path/to/patches/libllama.cmake ...
#
# The project is llama-cpp-python's, so a build of llama.cpp itself does not read this.

# Before the project's `set(... CACHE FORCE)`: a normal variable hides the cache's (CMP0126). The common library has
# the HTTP client, chat parsers and the command line of llama.cpp's programs.
set(LLAMA_BUILD_COMMON OFF)

# At the end, when the targets are known: a wheel holds no symbolic links, so each version would be another copy.
function(llama_libraries)
    foreach(target llama mtmd ggml ggml-base ggml-cpu ggml-cuda ggml-metal ggml-blas)
        if(TARGET ${target})
            set_property(TARGET ${target} PROPERTY VERSION)
            set_property(TARGET ${target} PROPERTY SOVERSION)
        endif()
    endforeach()
    # From PyPI's wheels, CUDA's libraries are in the environment, too: where, as seen from llama_cpp/lib.
    if(LLAMA_CUDA_LIBRARIES AND TARGET ggml-cuda)
        set_property(TARGET ggml-cuda APPEND PROPERTY INSTALL_RPATH "$ORIGIN/${LLAMA_CUDA_LIBRARIES}")
    endif()
endfunction()
cmake_language(DEFER CALL llama_libraries)
